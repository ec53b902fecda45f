"""Tables with columns of any meaning: files and frames, the schema that explains them, the store.

Only what prepares or reads such tables imports this room. pyarrow, and modules that
import it, are imported inside functions.
"""
