"""Predicts the speed of a run with another budget, look-ahead depth, cold tier or batch size.

    changes      what may change, and the configurations that result
    replay       counts: the claims of the run, made again without computing
    costs        seconds: of the run's record, and of a short probe of a tier
    steps        seconds of a step of another batch size, by a probe
    timeline     composition: when steps compute, and when rows move
    predict      all of it, for one run and several changes
    table        the predictions as text

Rooms above import from `recsys.what_if.predict`.
"""
