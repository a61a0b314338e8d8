"""Measures of a trained model."""
