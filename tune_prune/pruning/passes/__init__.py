"""Passes over calibration samples, forward and backward, and what statistics sum up of them."""
