# Finds PCRE2 and utf8proc, for patterns and NFC of tokenizers, and zstd, for inputs: for this build
# (cmake/dependencies.cmake) and for users of the static library (moiety-config.cmake). Static ones
# are preferred, so that a program needs none where it runs. Sets moiety_pcre2, moiety_utf8proc,
# moiety_zstd, their versions, and the targets moiety::pcre2, moiety::utf8proc and moiety::zstd.
find_path(MOIETY_PCRE2_INCLUDE pcre2.h)
find_library(MOIETY_PCRE2_LIBRARY NAMES libpcre2-8.a pcre2-8)
find_path(MOIETY_UTF8PROC_INCLUDE utf8proc.h)
find_library(MOIETY_UTF8PROC_LIBRARY NAMES libutf8proc.a utf8proc)
find_path(MOIETY_ZSTD_INCLUDE zstd.h)
find_library(MOIETY_ZSTD_LIBRARY NAMES libzstd.a zstd)
set(moiety_zstd FALSE)
set(moiety_zstd_version "")
set(moiety_pcre2 FALSE)
set(moiety_pcre2_version "")
set(moiety_utf8proc FALSE)
set(moiety_utf8proc_version "")

# moiety_read_version(NAME HEADER WORD...): the version from the header's #defines.
macro(moiety_read_version name header)
  foreach(word ${ARGN})
    file(STRINGS ${header} line REGEX "#define +${word} +[0-9]" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+ *$" number "${line}")
    list(APPEND ${name} ${number})
  endforeach()
  list(JOIN ${name} "." ${name})
endmacro()

# moiety_import(NAME LIBRARY INCLUDE)
macro(moiety_import name library include)
  if(NOT TARGET moiety::${name})
    add_library(moiety::${name} UNKNOWN IMPORTED)
    set_target_properties(moiety::${name} PROPERTIES
      IMPORTED_LOCATION ${library} INTERFACE_INCLUDE_DIRECTORIES ${include})
  endif()
endmacro()

if(MOIETY_PCRE2_INCLUDE AND MOIETY_PCRE2_LIBRARY)
  moiety_read_version(moiety_pcre2_version ${MOIETY_PCRE2_INCLUDE}/pcre2.h PCRE2_MAJOR PCRE2_MINOR)
  if(NOT moiety_pcre2_version VERSION_LESS 10.40)
    set(moiety_pcre2 TRUE)
    moiety_import(pcre2 ${MOIETY_PCRE2_LIBRARY} ${MOIETY_PCRE2_INCLUDE})
  endif()
endif()
if(MOIETY_UTF8PROC_INCLUDE AND MOIETY_UTF8PROC_LIBRARY)
  moiety_read_version(moiety_utf8proc_version ${MOIETY_UTF8PROC_INCLUDE}/utf8proc.h
    UTF8PROC_VERSION_MAJOR UTF8PROC_VERSION_MINOR)
  if(NOT moiety_utf8proc_version VERSION_LESS 2.4)
    set(moiety_utf8proc TRUE)
    moiety_import(utf8proc ${MOIETY_UTF8PROC_LIBRARY} ${MOIETY_UTF8PROC_INCLUDE})
  endif()
endif()
if(MOIETY_ZSTD_INCLUDE AND MOIETY_ZSTD_LIBRARY)
  moiety_read_version(moiety_zstd_version ${MOIETY_ZSTD_INCLUDE}/zstd.h
    ZSTD_VERSION_MAJOR ZSTD_VERSION_MINOR)
  if(NOT moiety_zstd_version VERSION_LESS 1.4)
    set(moiety_zstd TRUE)
    moiety_import(zstd ${MOIETY_ZSTD_LIBRARY} ${MOIETY_ZSTD_INCLUDE})
  endif()
endif()
