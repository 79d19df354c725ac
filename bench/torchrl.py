"""The benchmark of the scheme for TorchRL; what it measures stands in torchrl_scheme/contest.py.

    python bench/torchrl.py --help

A script's folder is the first place where imports look, so this file stands before the package of the same name: for
every benchmark of this folder, and for their workers. Imported as `torchrl`, it puts the package in its place.
"""

import sys

if __name__ == "__main__":
    from torchrl_scheme.contest import main

    main()
elif __name__ == "torchrl":
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    _elsewhere = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
    _spec = PathFinder.find_spec(__name__, _elsewhere)
    if _spec is None or _spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    sys.modules[__name__] = module_from_spec(_spec)  # import returns what this holds afterwards
    _spec.loader.exec_module(sys.modules[__name__])
