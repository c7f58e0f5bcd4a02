"""Pairs of image and text: sources, pixels, patches, and samples over ranks."""

import io
import json
import pickle
import re
import sys
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import BatchSampler, ByteTokenizer, MicroBatchLoader
from mcore_data.images import (
    ImageTextDataset,
    ImageTransform,
    JsonlImages,
    TarImages,
    patchify,
    unpatchify,
)

Image = pytest.importorskip("PIL.Image")
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def encoded(pixels, kind="png"):
    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(out, kind)
    return out.getvalue()


def flat(color, height=10, width=12, kind="png"):
    return encoded(np.broadcast_to(np.array(color, np.uint8), (height, width, 3)), kind)


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


@pytest.fixture
def shards(tmp_path):
    """Two tar files of 7 and 4 pairs, whose colour and text tell the number."""
    number = iter(range(11))
    for shard, count in enumerate((7, 4)):
        members = []
        for _ in range(count):
            i = next(number)
            kind = ("png", "jpg")[i % 2]
            raw = flat((20 * i, 0, 0), kind={"jpg": "jpeg"}.get(kind, kind))
            members += [
                (f"part.0/{i:03d}.{kind}", raw),
                (f"part.0/{i:03d}.txt", f"nr {i}".encode()),
            ]
            members.append((f"part.0/{i:03d}.json", json.dumps({"alt": f"alt {i}"}).encode()))
        members.append(("part.0/alone.png", flat((0, 0, 0))))
        tar(tmp_path / f"{shard}.tar", members)
    return tmp_path


def test_tar_files(shards):
    source = TarImages(shards)
    assert (len(source), source.left_out) == (11, 2)
    assert [pair.text for pair in map(source.__getitem__, range(11))] == [
        f"nr {i}" for i in range(11)
    ]
    assert source[8].key == "part.0/008"
    assert source[8].where == f"{shards / '1.tar'}: 'part.0/008'"
    assert pickle.loads(pickle.dumps(source))[9].image == source[9].image
    assert TarImages([shards / "1.tar"], text_key="alt")[0].text == "alt 7"
    with pytest.raises(IndexError, match="pair 11 of 11"):
        source[11]
    with pytest.raises(
        ValueError, match=r"1.tar: 'part.0/007': no text under 'no'; keys are 'alt'"
    ):
        TarImages(shards / "1.tar", text_key="no")[0]


def odd_member(path, name, kind):
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.txt")
        archive.addfile(info)
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    return path


def test_hostile_tar_files(tmp_path):
    path = tmp_path / "x.tar"
    for name, kind, message in (
        (
            "../../etc/cron.d/x",
            tarfile.REGTYPE,
            "'../../etc/cron.d/x' at byte 512 leads out of the",
        ),
        ("/etc/passwd", tarfile.REGTYPE, "'/etc/passwd' at byte 512 leads out of the archive"),
        ("a/../../b", tarfile.REGTYPE, "leads out of the archive"),
        ("b.png", tarfile.SYMTYPE, "'b.png' at byte 512 is no plain file"),
        ("b.png", tarfile.LNKTYPE, "is no plain file"),
        ("b.png", tarfile.CHRTYPE, "is no plain file"),
    ):
        odd_member(path, name, kind)
        with pytest.raises(
            ValueError, match=f"^{re.escape(str(path))}: member {message}|{message}"
        ):
            TarImages(path)
    whole = tar(path, [("a.png", flat((1, 2, 3))), ("a.txt", b"text" * 400)]).read_bytes()
    for raw, message in (
        (whole[:2100], r"truncated: it ends at byte \d+, the file has 2100|damaged one"),
        (b"no tar file" * 99, "no tar file, a compressed or a damaged one"),
        (b"", "no tar file|no pair of image and text"),
        (tar(path, [("a.txt", b"x")]).read_bytes(), r"no pair of image and text \(1 left out\)"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=message) as caught:
            TarImages(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
    tar(path, [("a.png", b"no image"), ("a.txt", b"\xff")])
    source = TarImages(path)
    with pytest.raises(ValueError, match=r"x.tar: 'a': text is no UTF-8 at byte 0"):
        source[0]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"x.tar: 'a': the file has become shorter"):
        source[0]
    for paths, message in ((tmp_path / "no", "no such file or folder"), ([], "no .tar file given")):
        with pytest.raises(ValueError, match=message):
            TarImages(paths)


def test_no_pair_is_lost_behind_a_damaged_header(tmp_path):
    """The library takes a header that it cannot read for the end of the archive."""
    path = tmp_path / "x.tar"
    members = [(f"{i}.{s}", b"x" * 700) for i in range(4) for s in ("png", "txt")]
    whole = tar(path, members).read_bytes()
    begin = whole.index(b"2.png\0")
    changed = bytearray(whole)
    changed[begin] ^= 1
    for raw in (bytes(changed), whole[: begin + 100]):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=rf"x.tar: damaged, .* begins at byte {begin}, and"):
            TarImages(path)
    path.write_bytes(whole + whole)
    with pytest.raises(ValueError, match=rf"several archives in one: .* byte {len(whole)} is not"):
        TarImages(path)
    path.write_bytes(whole + bytes(3 << 20))
    assert len(TarImages(path)) == 4


def test_json_lines(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(flat((0, 0, 0)))
    (tmp_path / "in" / "deep" / "a.png").write_bytes(flat((9, 9, 9)))
    rows = [
        {"image": "deep/a.png", "text": "gr\u00fcn"},
        {"image": "../secret.png", "text": "x"},
        {"image": str(tmp_path / "secret.png"), "text": "x"},
        {"image": "deep/b.png", "text": "x"},
        {"image": "deep/a.png"},
    ]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "in" / "x.jsonl"
    path.write_text("\n".join([lines[0], "", *lines[1:], "nonsense", "[]"]) + "\n")
    source = JsonlImages(path)
    assert len(source) == 7
    assert (source[0].text, source[0].where) == ("gr\u00fcn", f"{path}:1")
    for index, message in (
        (1, r"x.jsonl:3: image '../secret.png' leads out of"),
        (2, r"x.jsonl:4: image '/.*secret.png' leads out of"),
        (3, r"x.jsonl:5: image 'deep/b.png': No such file"),
        (4, r"x.jsonl:6: no text under 'text'; keys are 'image'"),
        (5, r"x.jsonl:7: no JSON \("),
        (6, r"x.jsonl:8: a JSON list, not an object"),
    ):
        with pytest.raises(ValueError, match=message):
            source[index]
    assert JsonlImages(path, root=tmp_path / "in" / "deep" / "..")[0].key == "deep/a.png"
    path.write_text("\n")
    with pytest.raises(ValueError, match="it holds no line"):
        JsonlImages(path)


@given(height=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_image_gets_the_size(height, width, seed):
    """A flat image stays what it is, but for the mean around it where it is padded."""
    raw = flat((51, 102, 204), height, width)
    for options in ({"fit": "crop"}, {"fit": "stretch"}, {"fit": "crop", "random": True}):
        pixels = ImageTransform(size=(8, 12), **PLAIN, **options)(raw, seed=(seed,))
        assert (pixels.shape, pixels.dtype) == ((3, 8, 12), np.float32)
        assert np.allclose(pixels, np.array([0.2, 0.4, 0.8])[:, None, None], atol=1e-6)
    padded = ImageTransform(size=(8, 12), fit="pad", mean=(0.5, 0.5, 0.5))(raw)
    filled = (padded != 0).all(0)
    rows, columns = filled.any(1).sum(), filled.any(0).sum()
    assert filled.sum() == rows * columns
    assert rows == 8 or columns == 12


def test_pixels():
    """Resizing is Pillow's; what is cut off is cut before: the middle, or anywhere at random."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 64, 3)).astype(np.uint8)
    raw = encoded(pixels)
    same = ImageTransform(size=(32, 64), **PLAIN)(raw)
    assert np.array_equal(np.round(same * 255).astype(np.uint8), pixels.transpose(2, 0, 1))
    middle = ImageTransform(size=(32, 32), **PLAIN)(raw)
    assert np.allclose(middle * 255, pixels[:, 16:48].transpose(2, 0, 1), atol=1e-3)
    half = Image.fromarray(pixels).resize((32, 16), Image.Resampling.BICUBIC)
    stretched = ImageTransform(size=(16, 32), fit="stretch", **PLAIN)(raw)
    assert np.allclose(stretched * 255, np.asarray(half).transpose(2, 0, 1), atol=1e-3)
    clip = ImageTransform(size=(32, 64))(raw)
    assert np.allclose(clip[2], (same[2] - 0.40821073) / 0.27577711, atol=1e-5)
    crop = ImageTransform(size=(16, 16), random=True, **PLAIN)
    views = [crop(raw, seed=(0, i)) for i in range(6)]
    assert np.array_equal(views[3], crop(raw, seed=(0, 3)))
    assert len({view.tobytes() for view in views}) == 6
    # Enlarged first, an image this wide would take gigabytes.
    assert ImageTransform(size=(64, 64))(flat((1, 1, 1), 1, 60_000)).shape == (3, 64, 64)


def test_odd_images():
    clear = np.zeros((4, 4, 4), np.uint8)
    out = io.BytesIO()
    Image.fromarray(clear, "RGBA").save(out, "png")
    transform = ImageTransform(size=(4, 4), **PLAIN)
    assert (transform(out.getvalue()) == 1).all()  # what is transparent lies on white
    assert np.allclose(transform(encoded(np.full((4, 4), 51))), 0.2)  # grey
    deep = Image.fromarray(np.full((4, 4), 51 * 257, np.uint16))
    numbers = Image.fromarray(np.full((4, 4), 0.2, np.float32))
    for picture, kind in ((deep, "png"), (deep, "tiff"), (numbers, "tiff")):
        out = io.BytesIO()
        picture.save(out, kind)
        if picture is deep:  # 16 bits a pixel
            assert np.allclose(transform(out.getvalue()), 0.2)
            continue
        with pytest.raises(ValueError, match=r"f: no image .*mode F, whose numbers have no full"):
            transform(out.getvalue(), where="f")
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright = np.repeat(np.array([[0, 255]], np.uint8), 4, 1).reshape(2, 4)
    Image.fromarray(upright).save(turned, "png", exif=exif)
    got = ImageTransform(size=(2, 4), **PLAIN)(turned.getvalue())[0]
    assert np.array_equal(got, upright[::-1, ::-1] / np.float32(255))
    good = flat((1, 2, 3), 50, 50)
    for raw in (b"", b"no image", good[:60], good[: len(good) // 2 + 20]):
        with pytest.raises(ValueError, match=r"^f: no image that can be read \(") as caught:
            transform(raw, where="f")
        assert "\n" not in str(caught.value)


@given(
    channels=st.integers(1, 4),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    patch=st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_patches(channels, rows, columns, patch):
    size = (rows * patch, columns * patch)
    rng = np.random.default_rng(0)
    image = rng.normal(size=(channels, *size))
    patches = patchify(image, patch)
    assert patches.shape == (rows * columns, channels * patch * patch)
    assert np.array_equal(unpatchify(patches, size, patch), image)
    # A product with a convolution's weight is the convolution.
    weight = rng.normal(size=(channels, patch, patch))
    for n in range(rows * columns):
        top, left = n // columns * patch, n % columns * patch
        window = image[:, top : top + patch, left : left + patch]
        assert np.isclose(patches[n] @ weight.reshape(-1), (window * weight).sum())


def test_what_makes_no_sense(shards):
    for make, message in (
        (lambda: ImageTransform(size=(0, 4)), r"size is \(0, 4\), the least is 1 x 1"),
        (lambda: ImageTransform(size=(4, 4), fit="cut"), "fit is 'cut', it can be crop, pad or"),
        (
            lambda: ImageTransform(size=(4, 4), fit="pad", random=True),
            "random goes with fit='crop'",
        ),
        (lambda: ImageTransform(size=(4, 4), zoom=0.5), "zoom 0.5 must be at least 1"),
        (lambda: patchify(np.zeros((3, 30, 32)), 14), "patches of side 14; nearest: 28 x 28"),
        (lambda: unpatchify(np.zeros((3, 4)), (4, 4), 2), r"3 patches, an image of \(4, 4\) has 4"),
        (lambda: dataset(shards, seq_length=0), "seq_length 0 and views 1 must be at least 1"),
        (lambda: dataset(shards, views=2), "2 views of a pair are all the same without random"),
        (lambda: dataset(shards, patch=3), "an image of 8 x 8 has no whole number of patches"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def dataset(shards, *, random=False, **options):
    transform = ImageTransform(size=(8, 8), random=random, **PLAIN)
    options = {"seq_length": 6, "tokenizer": ByteTokenizer(), **options}
    return ImageTextDataset(TarImages(shards), transform, **options)


def test_samples(shards):
    samples = dataset(shards, patch=4)
    sample = samples[10]
    assert bytes(sample.tokens[:5].tolist()) == b"nr 10"
    assert sample.labels.tolist() == [*b"r 10", 256, 0]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1, 0]
    assert sample.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert sample.cu_seqlens.tolist() == [0, 5, 6]
    assert sample.extra()["patches"].shape == (4, 48)
    assert dataset(shards)[3].extra()["images"].shape == (3, 8, 8)
    assert dataset(shards, seq_length=2)[10].labels.tolist() == [*b"r "]
    views = dataset(shards, views=3, random=True)
    assert len(views) == 33
    assert views[31].tokens.tolist() == sample.tokens.tolist()
    with pytest.raises(IndexError, match="sample 33 of 33"):
        views[33]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_ranks_resumed_at_any_sample_see_the_same_stream(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("t")
    pictures = [(f"{i}.png", flat((i, 0, 0))) for i in range(5)]
    texts = [(f"{i}.txt", b"x") for i in range(5)]
    tar(folder / "a.tar", sorted(pictures + texts))
    samples = dataset(folder)
    sampler = BatchSampler(len(samples), 4, seed=1, shuffle=True)
    consumed, seen = data.draw(st.integers(0, 9), label="start"), []
    for _ in range(3):
        ranks = data.draw(st.sampled_from([1, 2, 4]), label="ranks")
        steps = data.draw(st.integers(1, 2), label="steps")
        loaders = [
            MicroBatchLoader(
                samples,
                sampler,
                dp_rank=r,
                dp_size=ranks,
                micro_batch_size=1,
                consumed=consumed,
                prefetch=0,
            )
            for r in range(ranks)
        ]
        for _ in range(steps):
            micro = [next(loader) for loader in loaders]
            for parts in zip(*micro, strict=True):
                for part in parts:
                    seen += part["sample_ids"].tolist()
                    red = np.round(part["images"][:, 0, 0, 0] * 255).astype(int).tolist()
                    assert red == part["sample_ids"].tolist()
        consumed = loaders[0].state_dict()["consumed_samples"]
    start = consumed - len(seen)
    assert seen == sampler.take(start, len(seen)).tolist()


def test_a_pair_that_cannot_be_read_is_named(tmp_path):
    tar(tmp_path / "a.tar", [("k.png", b"no image"), ("k.txt", b"x")])
    loader = MicroBatchLoader(
        dataset(tmp_path), BatchSampler(1, 1), dp_rank=0, dp_size=1, micro_batch_size=1
    )
    with (
        loader,
        pytest.raises(RuntimeError, match=r"samples 0 failed: .*a.tar: 'k': no image that"),
    ):
        next(loader)


def test_the_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "mcore_data.images.pillow", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'mcore-data[images]'")):
        ImageTransform(size=(4, 4))(b"")
