"""Tables with columns of any meaning: files and frames, the schema that explains them, the store.

Only what prepares or reads such tables imports this room, which needs pyarrow.
"""

from recsys.errors import MissingDependency

try:
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        "tables need pyarrow, which is not installed; pip install pyarrow"
    ) from error
