"""Every error a caller may want to handle.

    RecsysError
    |-- ConfigError         (ValueError)       a key, its value, or two that exclude each other
    |-- DatasetFormatError  (ValueError)       a file, or a line of one, that breaks its format
    |-- StoreError          (ValueError)       a store that is missing, unfinished or damaged
    |-- ProfileError        (ValueError)       a profile that is damaged, or of other tables
    |-- WeightsError        (ValueError)       weights that are not the model's they should be
    |-- AlreadyExists       (FileExistsError)  a store or run folder that would be overwritten
    |-- IdOutOfRange        (IndexError,       an id that is no row of its table
    |                        RuntimeError)
    |-- MalformedBags       (ValueError,       ids, offsets or weights that do not make bags
    |                        RuntimeError)
    |-- BudgetTooSmall      (ValueError)       fast memory that cannot hold one mini-batch's rows
    |-- ColdTierError       (OSError)          files of rows that cannot be made, opened or moved
    |   |-- ColdTierDirty                      files of rows that a crash has left in the middle
    |   `-- TiersFailed                        rows that could not be moved between the tiers
    |-- ConflictingWrite    (RuntimeError)     a write to rows that are newer in fast memory
    |-- TrainingDiverged    (ArithmeticError)  a loss that is not a number any more
    |   `-- NonFiniteGradient                  a gradient of rows with nan or inf in it
    `-- MissingDependency   (ImportError)      an optional package that this call needs

Each also derives from the built-in a caller would guess, so `except ValueError` goes on working. A
message names the place, the rule, the value found and the way out.
"""

__all__ = [
    "AlreadyExists",
    "BudgetTooSmall",
    "ColdTierDirty",
    "ColdTierError",
    "ConfigError",
    "ConflictingWrite",
    "DatasetFormatError",
    "IdOutOfRange",
    "MalformedBags",
    "MissingDependency",
    "NonFiniteGradient",
    "ProfileError",
    "RecsysError",
    "StoreError",
    "TiersFailed",
    "TrainingDiverged",
    "WeightsError",
]


class RecsysError(Exception):
    """Base of the errors above."""


class ConfigError(RecsysError, ValueError):
    """A configuration that cannot be carried out."""


class DatasetFormatError(RecsysError, ValueError):
    """Data that breaks its format; the message names file and line, or array and sample."""


class StoreError(RecsysError, ValueError):
    """A folder that is not a whole, readable store."""


class ProfileError(RecsysError, ValueError):
    """Counts of lookups that cannot be read, or are not those of the tables they should be of."""


class WeightsError(RecsysError, ValueError):
    """A state dict that is not of the model it should be of."""


class AlreadyExists(RecsysError, FileExistsError):
    """A folder that would have been overwritten."""


class IdOutOfRange(RecsysError, IndexError, RuntimeError):
    """An id that is no row of its table; `nn.EmbeddingBag` raises a RuntimeError for it."""


class MalformedBags(RecsysError, ValueError, RuntimeError):
    """Input of a lookup that cannot be read; `nn.EmbeddingBag` raises now one, now the other."""


class BudgetTooSmall(RecsysError, ValueError):
    """Fast memory that cannot hold what one mini-batch needs; the message names what would."""


class ColdTierError(RecsysError, OSError):
    """Files of rows that cannot be made, opened, read or written."""


class ConflictingWrite(RecsysError, RuntimeError):
    """A write to the memory of rows whose newest values are in fast memory: one would be lost."""


class ColdTierDirty(ColdTierError):
    """Files of rows whose process ended while it moved them."""


class TiersFailed(ColdTierError):
    """Rows could not be moved between the tiers; every later use raises this, too."""


class TrainingDiverged(RecsysError, ArithmeticError):
    """The loss is not a number any more."""


class NonFiniteGradient(TrainingDiverged):
    """The gradient of a row has nan or inf in it; on the CPU, all other rows were updated."""


class MissingDependency(RecsysError, ImportError):
    """An optional package is needed and not installed; the message says how to get it."""
