// Unit tests of the core: what is pure, or nearly so. `make test-core` runs them.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
