// The oracle of tests/moe is this program's, too.
#include "tests/moe/exchange_ref.cpp"
