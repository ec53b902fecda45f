"""Raw files of Criteo Kaggle and Criteo 1TB."""

__all__ = ["CONVENTIONS"]

CONVENTIONS = ("classic", "torchrec")  # see `kaggle`
