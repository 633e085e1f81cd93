// A library has a source; what counts is its precompiled header (cmake/compiler.cmake).
