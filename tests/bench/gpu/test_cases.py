from recsys.bench.gpu.cases import QUICK, Model, Plan, cases_of


def test_by_default_the_baselines_come_first_and_the_published_model_second():
    [(first_dim, first), (second_dim, second)] = cases_of(Plan())

    assert (first_dim, second_dim) == (128, 64)
    assert [
        (each.model.name, each.model.batch_size, each.model.precision) for each in first[:5]
    ] == [
        ("kaggle", 16384, "tf32"),
        ("nvidia", 65536, "tf32"),
        ("nvidia", 65536, "bf16"),
        ("kaggle", 2048, "tf32"),
        ("kaggle", 65536, "tf32"),
    ]
    assert all(each.has_baselines == (each.share == "0.1") for each in first + second)
    assert [each.share for each in first[5:10]] == ["floor", "0.05", "0.2", "0.5", "1"]
    assert (len(first), len(second)) == (5 * 6, 3 * 6)
    names = [each.name for each in first + second]
    assert len(set(names)) == len(names)


def test_the_published_model_has_these_sizes():
    published = Model("nvidia", 128, 65536, "tf32")

    assert published.dense_arch == [512, 256, 128]
    assert published.over_arch == [1024, 1024, 512, 256, 1]
    assert Model("kaggle", 64, 2048, "tf32").dense_arch == [512, 256, 64]
    assert Model("kaggle", 64, 2048, "tf32").over_arch == [512, 256, 1]


def test_baselines_can_be_left_out():
    cases = cases_of(Plan(has_baselines=False))

    assert not any(each.has_baselines for _, of_dim in cases for each in of_dim)


def test_presets_can_be_chosen():
    [(dim, cases)] = cases_of(Plan(presets=("nvidia",), shares=("0.1",)))

    assert dim == 128
    assert [each.model.precision for each in cases] == ["tf32", "bf16"]
    assert all(each.model.name == "kaggle" for _, of_dim in cases_of(QUICK) for each in of_dim[:1])
