"""`python -m bench.models`."""

from bench.models.decoding import main

if __name__ == "__main__":
    main()
