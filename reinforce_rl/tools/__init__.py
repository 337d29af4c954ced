"""Tools to run by hand before training, such as making model folders."""
