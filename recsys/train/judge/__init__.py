"""A model applied to samples that it does not train on."""
