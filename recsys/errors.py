"""All errors that a caller may want to handle.

    RecsysError
    |-- ConfigError         (ValueError)       an invalid setting, or settings that conflict
    |-- DatasetFormatError  (ValueError)       a file, or a line of one, that breaks its format
    |-- StoreError          (ValueError)       a store that is missing, unfinished or damaged
    |-- CheckpointError     (ValueError)       a checkpoint that is missing, damaged, or of another
    |                                          model
    |-- ProfileError        (ValueError)       a profile that is damaged, or of other tables
    |-- WeightsError        (ValueError)       weights that do not fit the model
    |-- AlreadyExists       (FileExistsError)  a store or run folder that would be overwritten
    |-- IdOutOfRange        (IndexError,       an id that is not a row of its table
    |                        RuntimeError)
    |-- MalformedBags       (ValueError,       ids, offsets or weights that do not form bags
    |                        RuntimeError)
    |-- BudgetTooSmall      (ValueError)       a budget below the row maps and a slot
    |-- ColdTierError       (OSError)          row files that cannot be made, opened, read, written
    |   `-- TiersFailed                        rows that could not be moved between the tiers
    |-- ConflictingWrite    (RuntimeError)     a write to rows that are newer in fast memory
    |-- TrainingDiverged    (ArithmeticError)  a loss that is nan or inf
    |   `-- NonFiniteGradient                  a row gradient that has nan or inf in it
    |-- CallbackFailed      (RuntimeError)     an error of a callback of a training run
    |-- OtherRankFailed     (RuntimeError)     another process of a run that was lost
    `-- MissingDependency   (ImportError)      an optional package that this call needs

Each class also derives from the built-in error named beside it, so `except ValueError` works too. A
message names the location, the rule, the value found and a hint.
"""

__all__ = [
    "AlreadyExists",
    "BudgetTooSmall",
    "CallbackFailed",
    "CheckpointError",
    "ColdTierError",
    "ConfigError",
    "ConflictingWrite",
    "DatasetFormatError",
    "IdOutOfRange",
    "MalformedBags",
    "MissingDependency",
    "NonFiniteGradient",
    "OtherRankFailed",
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
    """A setting that is invalid, or that conflicts with another one."""


class DatasetFormatError(RecsysError, ValueError):
    """Data that breaks its format. The message names file and line, or array and sample."""


class StoreError(RecsysError, ValueError):
    """A folder that is not a complete, readable store."""


class CheckpointError(RecsysError, ValueError):
    """A checkpoint that is missing, incomplete or damaged, or that is of another model."""


class ProfileError(RecsysError, ValueError):
    """A profile or plan that cannot be read, or that was made for other tables."""


class WeightsError(RecsysError, ValueError):
    """A state dict that does not fit the model."""


class AlreadyExists(RecsysError, FileExistsError):
    """A file or folder that would have been overwritten."""


class IdOutOfRange(RecsysError, IndexError, RuntimeError):
    """An id that is not a row of its table; `nn.EmbeddingBag` raises a RuntimeError for it."""


class MalformedBags(RecsysError, ValueError, RuntimeError):
    """Ids, offsets or weights that do not form bags.

    `nn.EmbeddingBag` raises ValueError in some of these cases and RuntimeError in others.
    """


class BudgetTooSmall(RecsysError, ValueError):
    """A budget below the row maps and a slot of each group. The message names the minimum."""


class ColdTierError(RecsysError, OSError):
    """Row files that cannot be made, opened, read or written."""


class ConflictingWrite(RecsysError, RuntimeError):
    """A write to rows whose newest values are in fast memory. One of the two would be lost."""


class TiersFailed(ColdTierError):
    """Rows could not be moved between the tiers; every later use raises this, too."""


class TrainingDiverged(RecsysError, ArithmeticError):
    """The loss is nan or inf."""


class NonFiniteGradient(TrainingDiverged):
    """The gradient of a row has nan or inf in it. On the CPU, all other rows were updated."""


class CallbackFailed(RecsysError, RuntimeError):
    """A callback has raised an error. The message names the callback, its method and the place."""


class OtherRankFailed(RecsysError, RuntimeError):
    """Another rank raised an error or was killed, so this one lost its connection to it."""


class MissingDependency(RecsysError, ImportError):
    """An optional package is needed and not installed. The message says how to install it."""


def refuse(*rules: tuple[object, str]) -> None:
    """Raise ConfigError with the text of the first rule that is broken.

    Args:
        rules: Whether each is broken, and what is said then.
    """
    for is_broken, text in rules:
        if is_broken:
            raise ConfigError(text)
