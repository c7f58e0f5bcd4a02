"""`python -m mcore_inference` is the `mcore-inference` command."""

from mcore_inference.cli import main

raise SystemExit(main())
