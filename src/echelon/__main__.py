"""`python -m echelon`, for `torchrun -m echelon train`."""

from echelon.cli import main

if __name__ == "__main__":
    main()
