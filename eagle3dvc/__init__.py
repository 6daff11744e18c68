"""A DVC pipeline that trains EAGLE-3 drafters for large verifiers, computing only what is new."""

__version__ = "0.1.0"
