"""Schemas of public data sets, by name: `recsys prepare table FILES --schema NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import ConfigError

__all__ = ["NAMED_SCHEMAS", "find_schema"]

_CODE: Final[dict[str, Any]] = {"values": "integer"}
_TEXT: Final[dict[str, Any]] = {}

NAMED_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    # train.csv of Kaggle's Avazu challenge (2014): clicks on ads, in order of time.
    "avazu": {
        "label": "click",
        "timestamp": "hour",
        "timestamp_format": "%y%m%d%H",
        "categorical": {
            "C1": _CODE,
            "banner_pos": _CODE,
            "site_id": _TEXT,
            "site_domain": _TEXT,
            "site_category": _TEXT,
            "app_id": _TEXT,
            "app_domain": _TEXT,
            "app_category": _TEXT,
            "device_id": _TEXT,
            "device_ip": _TEXT,
            "device_model": _TEXT,
            "device_type": _CODE,
            "device_conn_type": _CODE,
            **{f"C{number}": _CODE for number in range(14, 22)},
        },
    },
    # MovieLens 1M as pairs of user and movie, with their features; the last pair of each user is
    # test.
    "movielens": {
        "group": "user",
        "categorical": {
            "user": _CODE,
            "user_f1": _CODE,
            "user_f2": _CODE,
            "user_f3": _CODE,
            "item": _CODE,
            "item_f1": _CODE,
        },
        "split": {"by": "column", "column": "split", "train": ["train"], "test": ["test"]},
        "negatives": {"item": "item", "item_columns": ["item_f1"]},
    },
    # Gowalla check-ins as pairs of user and place, in the split of NGCF and LightGCN.
    "gowalla": {
        "group": "user",
        "categorical": {"user": _CODE, "item": _CODE},
        "split": {"by": "column", "column": "split", "train": ["train"], "test": ["test"]},
        "negatives": {"item": "item"},
    },
    # Clicks of sessions in order (Diginetica, Tmall, Nowplaying, RetailRocket): the next item is
    # judged by the items before it. Sessions do not come again, so they have no table.
    "session_clicks": {
        "group": "session",
        "categorical": {"item": _CODE},
        "history": {"recent": {"of": "item", "max_length": 20}},
        "split": {"by": "last_one_out"},
        "negatives": {"item": "item"},
    },
}


def find_schema(name_or_file: str) -> Schema:
    """A schema by its name, or from a TOML file.

    Args:
        name_or_file: A name of `NAMED_SCHEMAS`; anything else is the path of a file.

    Raises:
        ConfigError: it is neither, or the file holds no valid schema.
    """
    if name_or_file in NAMED_SCHEMAS:
        return Schema.from_dict(NAMED_SCHEMAS[name_or_file])
    if not Path(name_or_file).exists():
        known = ", ".join(NAMED_SCHEMAS)
        raise ConfigError(
            f"schema {name_or_file} does not exist; name a TOML file, or one of {known}"
        )
    return Schema.from_toml(name_or_file)
