"""One open checkpoint format that always reshards: zarr v3 arrays, a JSON manifest, an atomic commit."""
