"""How fast a model runs in every mode there is, side by side: the instrument behind ``autostream bench``."""
