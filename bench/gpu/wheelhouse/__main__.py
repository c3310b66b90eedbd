"""`python -m bench.gpu.wheelhouse`."""

from bench.gpu.wheelhouse.collecting import main

if __name__ == "__main__":
    raise SystemExit(main())
