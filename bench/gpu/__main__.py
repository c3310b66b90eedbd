"""`python -m bench.gpu`."""

from bench.gpu.steps import main

if __name__ == "__main__":
    main()
