"""`python -m bench.engine`."""

from bench.engine.features import main

if __name__ == "__main__":
    main()
