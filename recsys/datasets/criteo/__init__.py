"""Raw files of Criteo Kaggle and Criteo 1TB."""
