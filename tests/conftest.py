"""Settings of all tests."""

from hypothesis import settings

# a busy machine is no fault: times belong in benchmarks/
settings.register_profile("nvalchemi", deadline=None)
settings.load_profile("nvalchemi")
