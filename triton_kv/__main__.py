"""`python -m triton_kv`."""

from triton_kv.cli import main

raise SystemExit(main())
