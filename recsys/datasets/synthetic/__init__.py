"""Synthetic samples in the shape of Criteo Kaggle's, and of Taobao's histories."""
