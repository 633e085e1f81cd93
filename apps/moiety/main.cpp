#include "apps/moiety/program.h"

int main(int argc, char** argv) { return moiety::app::run_program({argv + 1, argv + argc}); }
