"""Methods that read no calibration samples."""
