"""Preparation work that people run by hand before training: making model folders."""
