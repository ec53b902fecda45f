import sys, collections, time, traceback
from random import Random
import resource

resource.setrlimit(resource.RLIMIT_AS, (5 * 2**30, 5 * 2**30))
from fuzz_cases import good_files, run_case, WrongOutcomeError, TimeIsUp
import importlib

mod, names, lo, hi = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
readers = [
    v
    for k, v in vars(importlib.import_module(mod)).items()
    if k.isupper() and isinstance(v, tuple) and v and hasattr(v[0], "attack")
][0]
for r in readers:
    if names != "all" and names not in r.name:
        continue
    t = time.time()
    c = collections.Counter()
    fails = {}
    with good_files(r) as good:
        for seed in range(lo, hi):
            try:
                c[run_case(r, good, Random(seed))] += 1
            except (WrongOutcomeError, TimeIsUp) as e:
                c["WRONG"] += 1
                key = str(e)[:160]
                if len(fails) < 25 and key.split(": ")[0:3] and key not in fails:
                    fails[key] = (seed, e.__cause__)
    print(f"## {r.name}: {dict(c)} {time.time() - t:.1f}s", flush=True)
    for k, (s, cause) in fails.items():
        print("   seed", s, k)
        if cause is not None and "-v" in sys.argv:
            print("     ", "".join(traceback.format_tb(cause.__traceback__)[-2:]))
