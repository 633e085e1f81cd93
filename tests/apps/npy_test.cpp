// .npy files: what NumPy writes, and what it does not.
#include "apps/moiety/commands/npy.h"

#include <cstring>

#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::app {
namespace {

// A file as NumPy writes it, except for the padding.
std::string npy(const std::string& dictionary, const std::string& data, int version = 1) {
  std::string out = "\x93NUMPY";
  out += {static_cast<char>(version), '\0'};
  const size_t n = dictionary.size();
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) out += static_cast<char>(n >> 8 * i & 255);
  return out + dictionary + data;
}

std::string error_of_npy(const std::string& bytes) {
  const TemporaryDirectory dir;
  return error_of([&] { read_npy(dir.write("x.npy", bytes)); }, ErrorKind::kData);
}

void expect_error(const std::string& bytes, const std::string& part) {
  EXPECT_NE(error_of_npy(bytes).find(part), std::string::npos)
      << part << " in " << error_of_npy(bytes);
}

TEST(Npy, ReadsWhatNumpyWrites) {
  // numpy.save of numpy.arange(3, dtype="<f4").reshape(1, 3), byte by byte.
  std::string bytes("\x93NUMPY\x01\x00v\x00", 10);
  bytes += "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3), }";
  bytes.resize(127, ' ');
  bytes += "\n";
  bytes += std::string("\0\0\0\0\0\0\x80\x3f\0\0\0\x40", 12);
  const TemporaryDirectory dir;
  const NpyArray a = read_npy(dir.write("x.npy", bytes));
  EXPECT_EQ(a.header.descr, "<f4");
  EXPECT_EQ(a.header.shape, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(a.header.bytes, 12);
  EXPECT_EQ(a.header.offset, 128);
  const float expected[] = {0, 1, 2};
  EXPECT_EQ(std::memcmp(a.data.data(), expected, 12), 0);
  // And ours is the same.
  EXPECT_EQ(npy_header("<f4", a.header.shape), bytes.substr(0, 128));
}

TEST(Npy, HeadersOfEveryVersionOrderAndShape) {
  struct Case {
    const char* dictionary;
    std::vector<int64_t> shape;
    int64_t bytes;
  };
  const Case cases[] = {
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (), }  \n", {}, 4},
      {"{'shape':(5,),'fortran_order':False,'descr':'|u1'}", {5}, 5},
      {"{\"descr\": \"<u2\", \"fortran_order\": False, \"shape\": (2, 3)}\n", {2, 3}, 12},
      {"{ 'fortran_order' : False , 'shape' : ( 2 , 1 , 2 , ) , 'descr' : '<V2' }", {2, 1, 2}, 8},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 7), }", {0, 7}, 0},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775, 0), }",
       {9223372036854775, 0},
       0},
  };
  for (const Case& c : cases) {
    for (const int version : {1, 2, 3}) {
      const NpyHeader header = parse_npy_header("x", npy(c.dictionary, "", version));
      EXPECT_EQ(header.shape, c.shape) << c.dictionary;
      EXPECT_EQ(header.bytes, c.bytes) << c.dictionary;
    }
  }
}

TEST(Npy, OursReadsBackInEveryShape) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {7}, {0}, {3, 4}, {2, 3, 4}, {1234567890, 0, 5}}) {
    const std::string header = npy_header("<f4", shape);
    EXPECT_EQ(header.size() % 64, 0u);
    const NpyHeader back = parse_npy_header("x", header);
    EXPECT_EQ(back.shape, shape);
    EXPECT_EQ(back.offset, static_cast<int64_t>(header.size()));
  }
}

TEST(Npy, DamageIsNamed) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
  const std::string data(4, '\0');
  EXPECT_EQ(error_of_npy(npy(good, data)), "no error");
  expect_error("", "is no .npy file");
  expect_error("\x93NUMPY\x01", "is no .npy file");
  expect_error("\x93NUMPZ" + npy(good, data).substr(6), "is no .npy file");
  expect_error(npy(good, data, 4), "is of .npy version 4.0");
  expect_error(npy(good, data, 2).substr(0, 11), "header is cut");
  expect_error(npy(good, data).substr(0, 40), "header is cut");
  expect_error(npy(good, data).substr(0, npy(good, data).size() - 1), "bytes long, but '<f4' [1]");
  expect_error(npy(good, data + "x"), "bytes long, but '<f4' [1]");
  expect_error(npy(good, data, 2).replace(8, 4, "\xff\xff\xff\x7f"), "header is cut");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = good;
    return npy(changed.replace(changed.find(from), from.size(), to), data);
  };
  expect_error(with("<f4", "<f8"), "its elements are '<f8'; known are <f4");
  expect_error(with("<f4", ">f4"), "its elements are '>f4'");
  expect_error(with("False", "True"), "is in Fortran order");
  expect_error(with("(1,)", "(3000000000, 3000000000, 3000000000)"), "too many elements");
  expect_error(with("(1,)", "(3000000000, 0, 3000000000, 3000000000)"), "too many elements");
  for (const char* shape : {"(1)", "1", "(-1,)", "(,)", "(1 1)", "(1,,)", "[1]", "(1", "(1e3,)",
                            "(99999999999999999999,)", "(-0,)", "(True,)"}) {
    expect_error(with("(1,)", shape), "header is damaged");
  }
  for (const char* word : {"false", "0", "Falsey", "'False'"}) {
    expect_error(with("False", word), "header is damaged");
  }
  expect_error(with("'descr'", "'desc'"), "header is damaged");
  expect_error(with("'descr'", "'shape'"), "header is damaged");
  expect_error(with("'<f4'", "'<f4"), "header is damaged");
  expect_error(with("'descr': '<f4', ", ""), "header is damaged");
  expect_error(with(", }", ", }x"), "header is damaged");
  expect_error(with("{", ""), "header is damaged");
}

TEST(Npy, WhatIsNoFileIsNamed) {
  const TemporaryDirectory dir;
  EXPECT_THROW(read_npy(dir / "none.npy"), DataError);
  EXPECT_THROW(read_npy(dir / "."), DataError);
}

}  // namespace
}  // namespace moiety::app
