"""The fast memory that the tables of a model take, once they have optimizer state."""

from recsys.embeddings.tables_module import groups_of
from recsys.embeddings.tiers.budget import SpaceSize, map_bytes
from recsys.train.build import row_optimizer


def fast_memory_of(model, config):
    """Bytes of row maps and slots; the tables of the model must have slots."""
    formula, found = row_optimizer(config.optimizer), 0
    for group in groups_of(model):
        assert group.num_slots
        space = SpaceSize.of(group.tables, formula.state_sizes(group.dim))
        found += map_bytes(space.num_rows) + group.num_slots * space.slot_bytes
    return found
