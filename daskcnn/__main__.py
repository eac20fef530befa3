"""`python -m daskcnn`: the command `daskcnn`, where it is not on the PATH."""

from daskcnn.cli import main

if __name__ == "__main__":
    main()
