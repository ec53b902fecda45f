"""A small model with tables in one or two tiers, steps that train it, and its checkpoints."""

import copy
import json
import warnings

import torch
from torch import nn

import recsys
from recsys import Checkpoints, HotColdEmbeddingBagCollection, JaggedIds, load_checkpoint
from recsys.embeddings import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad, TableConfig

SIZES, DIMS = (150, 7, 60), (4, 4, 8)
FORMULAS = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "row-wise adagrad": RowWiseAdagrad,
    "adam": Adam,
    "partial row-wise adam": PartialRowWiseAdam,
}
TORCH = {
    "torch sgd": torch.optim.SGD,
    "torch adagrad": torch.optim.Adagrad,
    "torch adam": torch.optim.Adam,
}


class Training:
    """A model of collections with formulas, or of bags with an optimizer of torch."""

    def __init__(self, kind="adagrad", tier="resident", folder=None, seed=0):
        torch.manual_seed(seed)
        self.losses, self.is_collection = [], kind in FORMULAS
        more = {}
        if tier != "resident":
            more = {"budget": 1700 if self.is_collection else 4000, "cold_tier": tier}
        self.model = nn.Module()
        self.model.frozen = nn.EmbeddingBag(9, 4, mode="sum").requires_grad_(False)
        self.model.top = nn.Linear(sum(DIMS) + 4, 1)
        self.model.register_buffer("count", torch.tensor(3))
        if self.is_collection:
            self.optimizers = [torch.optim.Adam(self.model.top.parameters(), lr=0.01)]
            for name, places in (("small", (0, 1)), ("large", (2,))):
                tables = [
                    TableConfig(
                        name=f"t{place}",
                        num_embeddings=SIZES[place],
                        embedding_dim=DIMS[place],
                        feature_names=(str(place),),
                    )
                    for place in places
                ]
                if tier == "file":
                    more["cold_path"] = folder / name
                made = HotColdEmbeddingBagCollection(
                    tables, optimizer=FORMULAS[kind](lr=0.1), auto_apply=False, **more
                )
                setattr(self.model, name, made)
                self.optimizers.append(made.row_optimizer)
            return
        if tier == "file":
            more["cold_path"] = folder / "bags"
        self.model.bags = nn.ModuleList(
            nn.EmbeddingBag(size, dim, mode="sum") for size, dim in zip(SIZES, DIMS, strict=True)
        )
        given = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizers = [TORCH[kind](given, lr=0.1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how lazy_adam differs
            recsys.accelerate(
                self.model, optimizer=self.optimizers[0], lazy_adam=True, **more, always=True
            )

    def weights(self):
        if self.is_collection:
            small, large = self.model.small.embedding_bags, self.model.large.embedding_bags
            return [small.t0.weight, small.t1.weight, large.t2.weight]
        return [bag.weight for bag in self.model.bags]

    def step(self, seed, most=1000):
        """Train on a mini-batch of rows below `most`."""
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(min(size, most), (6,), generator=generator) for size in SIZES]
        labels = torch.rand(6, generator=generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.is_collection:
            given = JaggedIds.from_one_hot(["0", "1"], torch.stack(rows[:2]))
            pooled = [self.model.small(given).values()]
            given = JaggedIds.from_one_hot(["2"], torch.stack(rows[2:]))
            pooled.append(self.model.large(given).values())
        else:
            pooled = [bag(ids[:, None]) for bag, ids in zip(self.model.bags, rows, strict=True)]
        pooled.append(self.model.frozen(rows[1][:, None]))
        loss = (self.model.top(torch.cat(pooled, 1)).squeeze(1) - labels).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append(loss.item())

    def write(self, place, seed):
        """Change rows without an optimizer."""
        weight = self.weights()[place]
        with torch.no_grad():
            if seed % 3 == 0:
                weight.mul_(0.5)
            elif seed % 3 == 1:
                weight[seed % len(weight)] = seed / 10
            else:
                weight.data.add_(0.25)

    def snapshot(self):
        """Every number of the training, as it can be loaded."""
        states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
        return copy.deepcopy(self.model.state_dict()), states

    def load(self, snapshot):
        model, states = copy.deepcopy(snapshot)
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    @property
    def parts(self):
        """What checkpoints save of it."""
        return {"model": self.model, "optimizers": self.optimizers}

    def saved(self, folder, **more):
        return Checkpoints(folder, **self.parts, **more)


def require_equal(found, expected, place="training"):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (place, found.keys(), expected.keys())
        for key, value in expected.items():
            require_equal(found[key], value, f"{place}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, pair in enumerate(zip(found, expected, strict=True)):
            require_equal(*pair, f"{place}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), (place, found, expected)
    else:
        assert found == expected, place


def require_restores(training, folder, **more):
    """Require the checkpoint to have the numbers that the training has now."""
    again = Training(seed=1)
    load_checkpoint(folder, **again.parts, **more)
    require_equal(again.snapshot(), training.snapshot())


def save_and_wait(checkpoints, **more):
    checkpoints.save(**more)
    return checkpoints.wait()


def full_disk(*_):
    raise OSError("No space left on device")


def set_block_bytes(monkeypatch, num_bytes):
    # Small files then take several reads, and small tables several parts of 64 rows.
    for name, value in (
        ("format.BLOCK_BYTES", num_bytes),
        ("save.BLOCK_BYTES", num_bytes),
        ("format._READ_BYTES", num_bytes // 4),
        ("save._LISTED_WORDS", 1),
    ):
        monkeypatch.setattr(f"recsys.train.checkpoint.{name}", value)


def newest(folder):
    """The number of the newest complete checkpoint; None if there is none."""
    return max(numbers_of(folder), default=None)


def numbers_of(folder):
    """The checkpoints that have a manifest."""
    return sorted(int(path.stem) for path in folder.glob("*.json"))


def manifest_of(folder, number):
    """The content of a manifest."""
    return json.loads((folder / f"{number:08}.json").read_text().splitlines()[0])


def listed(folder):
    """The newest checkpoint, and the one before it, if its files are there."""
    last = newest(folder)
    if last is None:
        return []
    before = manifest_of(folder, last)["before"]
    return [last, *(number for number in numbers_of(folder) if number == before)]


def require_only_needed_files(folder):
    expected = set()
    for number in listed(folder):
        expected |= {f"{number:08}.json", *manifest_of(folder, number)["pieces"]}
    assert {path.name for path in folder.iterdir()} == expected
