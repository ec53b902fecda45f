"""Synthetic samples in the shape of Criteo Kaggle's."""
