"""Import time, building and encoding beside the official SDK: python benchmarks/foundation.py"""

from side_by_side import both, table

if __name__ == "__main__":
    table(*both("measure_foundation.py", rounds=3))
