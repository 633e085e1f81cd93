// `moiety quantize` and `moiety dequantize` through the program, held against the golden vectors
// and against the library.
#include "apps/moiety/commands/quantize.h"

#include <cstring>

#include "apps/moiety/commands/npy.h"
#include "apps/moiety/commands/quantized_directory.h"
#include "moiety/formats/bf16.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Shape = std::vector<int64_t>;

Json golden(const std::string& name) {
  return Json::parse(read_all(std::string(MOIETY_SOURCE_DIR) + "/tests/golden/" + name + ".json"));
}

std::string bytes_of(const std::string& hexadecimal) {
  std::string out;
  for (size_t i = 0; i < hexadecimal.size(); i += 2) {
    out += static_cast<char>(std::stoi(hexadecimal.substr(i, 2), nullptr, 16));
  }
  return out;
}

std::string data_of(const std::string& path) {
  const NpyArray a = read_npy(path);
  return {reinterpret_cast<const char*>(a.data.data()), static_cast<size_t>(a.data.bytes())};
}

std::string npy(const char* descr, const Shape& shape, const std::string& data) {
  return npy_header(descr, shape) + data;
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), sizeof(T) * values.size()};
}

// Numbers of different sizes.
std::string floats(int64_t n) {
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) {
    out.push_back(static_cast<float>(i % 37 - 18) * std::ldexp(1.0f, static_cast<int>(i % 11) - 5));
  }
  return raw(out);
}

// The options of a golden case.
Arguments options_of(const Json& o) {
  Arguments out;
  const std::string directions = o.value("directions", "both");
  out.push_back("--row");
  if (directions == "both") out.push_back("--col");
  for (const auto& [key, value] : o.items()) {
    if (key == "element" || key == "rounding")
      out.push_back(text("--{}={}", key, value.get<std::string>()));
    if (key == "seed" || key == "draw") out.push_back(text("--{}={}", key, value.get<uint64_t>()));
    if (key == "tensor_id") out.push_back(text("--tensor-id={}", value.get<uint64_t>()));
    if (key == "pow2") out.push_back(value.get<bool>() ? "--pow2" : "--no-pow2");
    if (key == "rht") out.push_back("--rht");
    if (key == "row_scaled") out.push_back("--row-scaled");
  }
  return out;
}

// Options that the program does not have.
bool is_special(const Json& o) {
  return o.contains("row0") || o.contains("full_rows") || o.contains("amax_given") ||
         o.contains("amax_floor") || o.contains("rht_signs");
}

class QuantizeFormat : public ::testing::TestWithParam<const char*> {};

TEST_P(QuantizeFormat, FilesHoldTheGoldenBytes) {
  const Json inputs = golden("inputs"), cases = golden(GetParam());
  const TemporaryDirectory dir;
  int run_cases = 0;
  for (const Json& c : cases) {
    if (is_special(c.at("options")) || c.at("input") == "tall") continue;
    SCOPED_TRACE(c.at("name").get<std::string>());
    const Json& in = inputs.at(c.at("input").get<std::string>());
    const bool bf16 = in.at("dtype") == "bfloat16";
    const std::string path = dir.write(
        "in.npy",
        npy(bf16 ? "<u2" : "<f4", {in.at("rows"), in.at("cols")}, bytes_of(in.at("data"))));
    const std::string out = dir / "out";
    Arguments arguments{"quantize", path, "--format", GetParam(), "--out", out, "--force"};
    if (bf16) arguments.push_back("--bf16");
    const ProgramResult result = run(arguments + options_of(c.at("options")));
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_EQ(result.err.find("inf or NaN") != std::string::npos,
              c.at("expect").at("flags").get<std::string>().find('1') != std::string::npos);
    for (const char* array :
         {"row_data", "row_scales", "col_data", "col_scales", "amax", "tensor_scale"}) {
      const std::string file = text("{}/{}.npy", out, array);
      ASSERT_EQ(fs::exists(file), c.at("expect").contains(array)) << array;
      if (!fs::exists(file)) continue;
      const std::string expected = bytes_of(c.at("expect").at(array));
      EXPECT_EQ(data_of(file).substr(0, expected.size()), expected) << array;
    }
    ++run_cases;
  }
  EXPECT_GT(run_cases, 10);
}

TEST_P(QuantizeFormat, DequantizesWhatItWrote) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {3, 5, 40}, floats(600)));
  const std::string out = dir / "out", back = dir / "back.npy";
  ASSERT_EQ(run({"quantize", in, "--format", GetParam(), "--out", out, "--row", "--col"}).code, 0);
  ASSERT_EQ(run({"dequantize", out, "--out", back}).code, 0);
  EXPECT_EQ(read_npy(back).header.shape, (Shape{3, 5, 40}));
  const bool straight = std::string(GetParam()).starts_with("mxfp8");
  const std::string col = dir / "col.npy";
  ASSERT_EQ(run({"dequantize", out, "--out", col, "--col"}).code, 0);
  EXPECT_EQ(read_npy(col).header.shape, straight ? (Shape{15, 40}) : (Shape{40, 15}));
  // The values are near: 4 bits have steps of a third at most, of the largest number of a tile.
  const NpyArray x = read_npy(in), row = read_npy(back), columns = read_npy(col);
  const auto at = [](const NpyArray& a, int64_t i) {
    return reinterpret_cast<const float*>(a.data.data())[i];
  };
  for (int64_t m = 0; m < 15; ++m) {
    for (int64_t k = 0; k < 40; ++k) {
      const float exact = at(x, m * 40 + k);
      EXPECT_NEAR(at(row, m * 40 + k), exact, 110);
      EXPECT_NEAR(at(columns, straight ? m * 40 + k : k * 15 + m), exact, 110);
    }
  }
  ASSERT_EQ(run({"dequantize", out, "--out", dir / "op.npy", "--operand"}).code, 0);
  EXPECT_EQ(read_npy(dir / "op.npy").header.descr, "<u2");
}

INSTANTIATE_TEST_SUITE_P(Formats, QuantizeFormat,
                         ::testing::Values("fp8_tensor", "fp8_block_1x128", "fp8_block_128x128",
                                           "mxfp8", "mxfp8_tile32", "nvfp4", "nvfp4_tile16"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Quantize, ValuesOfTheRampByHand) {
  const TemporaryDirectory dir;
  std::vector<float> ramp;
  for (int i = 0; i < 16; ++i) ramp.push_back(static_cast<float>(i) - 7.5f);
  const std::string in = dir.write("in.npy", npy("<f4", {16}, raw(ramp)));
  ASSERT_EQ(run({"quantize", in, "--format=mxfp8", "--out", dir / "q"}).code, 0);
  ASSERT_EQ(run({"dequantize", dir / "q", "--out", dir / "y.npy"}).code, 0);
  const NpyArray y = read_npy(dir / "y.npy");
  EXPECT_EQ(y.header.shape, (Shape{16}));
  EXPECT_EQ(std::memcmp(y.data.data(), ramp.data(), 64), 0);  // 4 significant bits suffice
}

TEST(Quantize, BFloat16InAllItsFilesIsTheSame) {
  const TemporaryDirectory dir;
  std::vector<uint16_t> bits;
  for (int i = 0; i < 96; ++i) bits.push_back(std::bit_cast<uint16_t>(bf16(0.37f * (i - 40))));
  std::string data[3];
  const char* descr[] = {"<u2", "<V2", "|V2"};
  for (int i = 0; i < 3; ++i) {
    const std::string in = dir.write("in.npy", npy(descr[i], {3, 32}, raw(bits)));
    Arguments a{"quantize", in, "--format=nvfp4", "--out", dir / "q", "--force"};
    if (i == 0) {
      const ProgramResult refused = run(a);
      EXPECT_EQ(refused.code, kExitData);
      EXPECT_NE(refused.last_line().find("or as '<u2' with --bf16"), std::string::npos);
      a.push_back("--bf16");
    }
    ASSERT_EQ(run(a).code, 0);
    data[i] = data_of(dir / "q/row_data.npy");
  }
  EXPECT_EQ(data[0], data[1]);
  EXPECT_EQ(data[0], data[2]);
}

TEST(Quantize, LayoutsReadBack) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {130, 150}, floats(130 * 150)));
  struct Case {
    const char *format, *layout;
    Shape row, col;
  };
  for (const Case& c :
       {Case{"nvfp4", "sm100", {3072}, {3072}}, Case{"mxfp8", "padded", {256, 8}, {256, 8}},
        Case{"fp8_block_1x128", "sm90", {2, 132}, {2, 152}}}) {
    const Arguments a{"quantize", in, "--format", c.format, "--row", "--col", "--force", "--out"};
    ASSERT_EQ(run(a + Arguments{dir / "compact"}).code, 0);
    ASSERT_EQ(run(a + Arguments{dir / "other", "--layout", c.layout}).code, 0);
    EXPECT_EQ(read_npy(dir / "other/row_scales.npy").header.shape, c.row) << c.layout;
    EXPECT_EQ(read_npy(dir / "other/col_scales.npy").header.shape, c.col) << c.layout;
    for (const char* direction : {"--force", "--col"}) {
      for (const char* which : {"compact", "other"}) {
        ASSERT_EQ(
            run({"dequantize", dir / which, "--out", dir / which + ".npy", "--force", direction})
                .code,
            0);
      }
      EXPECT_EQ(data_of(dir / "compact.npy"), data_of(dir / "other.npy"));
    }
  }
}

TEST(Quantize, RhtIsTakenBack) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {19, 32}, floats(19 * 32)));
  ASSERT_EQ(run({"quantize", in, "--format=nvfp4", "--rht", "--col", "--out", dir / "q"}).code, 0);
  ASSERT_EQ(run({"dequantize", dir / "q", "--col", "--out", dir / "rotated.npy"}).code, 0);
  EXPECT_EQ(read_npy(dir / "rotated.npy").header.shape, (Shape{32, 32}));
  ASSERT_EQ(run({"dequantize", dir / "q", "--col", "--undo-rht", "--out", dir / "x.npy"}).code, 0);
  EXPECT_EQ(read_npy(dir / "x.npy").header.shape, (Shape{32, 19}));
}

TEST(Quantize, EmptyMatrices) {
  const TemporaryDirectory dir;
  for (const Shape& shape : {Shape{0, 48}, Shape{5, 0}, Shape{2, 0, 3}}) {
    const std::string in = dir.write("in.npy", npy("<f4", shape, ""));
    for (const char* format : {"fp8_tensor", "mxfp8", "nvfp4_tile16"}) {
      ASSERT_EQ(
          run({"quantize", in, "--format", format, "--row", "--col", "--force", "--out", dir / "q"})
              .code,
          0);
      ASSERT_EQ(run({"dequantize", dir / "q", "--force", "--out", dir / "y.npy"}).code, 0);
      EXPECT_EQ(read_npy(dir / "y.npy").header.shape, shape);
    }
  }
}

TEST(Quantize, NothingIsOverwrittenUnasked) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {2, 32}, floats(64)));
  const Arguments a{"quantize", in, "--format=mxfp8", "--row", "--col", "--out", dir / "q"};
  ASSERT_EQ(run(a).code, 0);
  const std::string before = data_of(dir / "q/row_data.npy");
  const ProgramResult again = run(a);
  EXPECT_EQ(again.code, kExitUsage);
  EXPECT_NE(again.last_line().find("is there already; --force overwrites"), std::string::npos);
  EXPECT_EQ(data_of(dir / "q/row_data.npy"), before);
  // Another tensor leaves nothing of the first one.
  ASSERT_EQ(run({"quantize", in, "--format=fp8_tensor", "--force", "--out", dir / "q"}).code, 0);
  EXPECT_FALSE(fs::exists(dir / "q/row_scales.npy"));
  EXPECT_FALSE(fs::exists(dir / "q/col_data.npy"));
  ASSERT_EQ(run({"dequantize", dir / "q", "--out", dir / "y.npy"}).code, 0);
  EXPECT_EQ(run({"dequantize", dir / "q", "--out", dir / "y.npy"}).code, kExitUsage);
  EXPECT_EQ(run({"dequantize", dir / "q", "--out", dir / "y.npy", "--force"}).code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "q"), {}), 4);  // no temporary files
}

TEST(Quantize, WhatDoesNotGoTogetherIsNamed) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {2, 32}, floats(64)));
  const std::string other = dir.write("u4.npy", npy("<u4", {2, 32}, floats(64)));
  const std::string scalar = dir.write("scalar.npy", npy("<f4", {}, floats(1)));
  const auto command = [&](const std::string& input, const Arguments& more) {
    return run(Arguments{"quantize", input, "--out", dir / "q"} + more);
  };
  struct Bad {
    std::string input;
    Arguments more;
    int code;
    const char* message;
  };
  const Bad cases[] = {
      {in, {}, kExitUsage, "--format is required"},
      {in, {"--format=fp7"}, kExitUsage, "fp7"},
      {in, {"--format=nvfp4", "--element=e5m2"}, kExitUsage, "elements of nvfp4 are e5m2"},
      {in, {"--format=mxfp8", "--pow2"}, kExitUsage, "pow2_scales with mxfp8"},
      {in, {"--format=mxfp8", "--rht", "--col"}, kExitUsage, "rht_col with mxfp8"},
      {in, {"--format=nvfp4", "--rht"}, kExitUsage, "--col is not given"},
      {in, {"--format=nvfp4", "--row-scaled", "--col"}, kExitUsage, "row_scaled has no col"},
      {in, {"--format=mxfp8", "--row-scaled"}, kExitUsage, "row_scaled with mxfp8"},
      {in, {"--format=mxfp8", "--layout=sm90"}, kExitUsage, "sm90_mn_major"},
      {in, {"--format=fp8_tensor", "--layout=sm100"}, kExitUsage, "fp8_tensor"},
      {in, {"--format=mxfp8", "--seed=3"}, kExitUsage, "--seed"},
      {other, {"--format=mxfp8"}, kExitData, "is '<u4' [2, 32], expected '<f4'"},
      {scalar, {"--format=mxfp8"}, kExitData, "is a scalar"},
      {dir / "none.npy", {"--format=mxfp8"}, kExitData, "cannot open"},
  };
  for (const Bad& c : cases) {
    const ProgramResult result = command(c.input, c.more);
    EXPECT_EQ(result.code, c.code) << result.err;
    EXPECT_NE(result.err.find(c.message), std::string::npos) << c.message << " in " << result.err;
    EXPECT_FALSE(fs::exists(dir / "q"));
  }
}

TEST(Dequantize, DamagedDirectoriesAreNamed) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {4, 32}, floats(128)));
  const std::string q = dir / "q";
  const auto make = [&](const Arguments& more = {}) {
    ASSERT_EQ(run(Arguments{"quantize", in, "--format=nvfp4", "--force", "--out", q} + more).code,
              0);
  };
  const auto expect = [&](int code, const std::string& part, const Arguments& more = {}) {
    const ProgramResult result =
        run(Arguments{"dequantize", q, "--force", "--out", dir / "y.npy"} + more);
    EXPECT_EQ(result.code, code) << part << "; " << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << part << " in " << result.err;
    EXPECT_FALSE(fs::exists(dir / "y.npy"));
  };
  expect(kExitData, "quantized.json");
  make();
  expect(kExitUsage, "has no col data", {"--col"});
  expect(kExitUsage, "--undo-rht is for", {"--undo-rht"});
  fs::remove(q + "/row_scales.npy");
  expect(kExitData, "row_scales.npy: cannot open");
  make();
  dir.write("q/row_data.npy", npy("|u1", {4, 15}, std::string(60, 'x')));
  expect(kExitData, "row_data.npy: is '|u1' [4, 15], but by quantized.json it is '|u1' [4, 16]");
  make();
  dir.write("q/tensor_scale.npy", npy("<u4", {2}, std::string(8, 'x')));
  expect(kExitData, "tensor_scale.npy: is '<u4' [2], but");
  // Descriptions that are none.
  make();
  std::string json = read_all(q + "/quantized.json");
  json = json.substr(0, json.rfind(",\n  \"crc32c\"")) + "\n}\n";  // else it would name any change
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = json;
    ASSERT_NE(changed.find(from), std::string::npos) << from;
    dir.write("q/quantized.json", changed.replace(changed.find(from), from.size(), to));
  };
  struct Change {
    const char *from, *to, *message;
  };
  for (const Change& c :
       {Change{"{", "", "is no JSON object"},
        Change{"\"version\": 1", "\"version\": 2", "is of version 2"},
        Change{"\"nvfp4\"", "\"nvfp5\"", "format is unknown"},
        Change{"\"nvfp4\"", "4", "format is 4"},
        Change{"\"e2m1\"", "\"e4m3\"", "elements of nvfp4"},
        Change{"\"rht\": false", "\"rht\": 0", "rht is 0"},
        Change{"\"rht\"", "\"rth\"", "rht is missing"},
        Change{"{", "{\"more\": 1,", "unknown key more"}, Change{"32", "-32", "shape is"},
        Change{"32", "4294967296, 4294967296", "shape is of no tensor"},
        Change{"32", "281474976710656", "shape is of no tensor"},
        Change{"32", "140737488355328, 0", "shape is of no tensor"},
        Change{"\"compact\"", "\"sm90\"", "sm90_mn_major"},
        Change{"\"row\"", "\"up\"", "directions is 'up'"}}) {
    with(c.from, c.to);
    const ProgramResult result = run({"dequantize", q, "--force", "--out", dir / "y.npy"});
    EXPECT_NE(result.code, kExitDone) << c.to;
    EXPECT_NE(result.code, kExitInternal) << c.to << ": " << result.err;
    EXPECT_NE(result.err.find(c.message), std::string::npos) << c.message << " in " << result.err;
  }
}

TEST(Quantize, AnyChangedByteIsFound) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {4, 32}, floats(128)));
  const std::string q = dir / "q";
  ASSERT_EQ(run({"quantize", in, "--format=nvfp4", "--row", "--col", "--rht", "--out", q}).code, 0);
  EXPECT_EQ(run({"verify", q}).code, kExitDone);
  int tried = 0;
  for (const auto& entry : fs::directory_iterator(q)) {
    const std::string name = entry.path().filename().string(), good = read_all(entry.path());
    for (size_t at = 0; at < good.size(); at += 1 + good.size() / 100) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
      dir.write("q/" + name, bad);
      const ProgramResult result = run({"verify", q});
      EXPECT_EQ(result.code, kExitData) << name << " byte " << at << ": " << result.err;
      EXPECT_NE(result.last_line().find(q + "/"), std::string::npos) << result.err;
      ++tried;
    }
    dir.write("q/" + name, good);
  }
  EXPECT_GT(tried, 300);
  // Reading finds it too.
  const std::string data = read_all(q + "/row_data.npy");
  dir.write("q/row_data.npy", data.substr(0, data.size() - 1) + '~');
  const ProgramResult result = run({"dequantize", q, "--out", dir / "y.npy"});
  EXPECT_EQ(result.code, kExitData);
  EXPECT_NE(result.last_line().find("row_data.npy: the file is damaged: crc32c"), std::string::npos)
      << result.err;
}

TEST(Quantize, FilesWithoutChecksumsAreRead) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("in.npy", npy("<f4", {4, 32}, floats(128)));
  const std::string q = dir / "q";
  ASSERT_EQ(run({"quantize", in, "--format=nvfp4", "--layout=sm100", "--out", q}).code, 0);
  const std::string json = read_all(q + "/quantized.json");
  dir.write("q/quantized.json", json.substr(0, json.rfind(",\n  \"crc32c\"")) + "\n}\n");
  EXPECT_EQ(run({"dequantize", q, "--out", dir / "y.npy"}).code, kExitDone);
  const ProgramResult result = run({"verify", q});
  EXPECT_EQ(result.code, kExitDone) << result.err;
  EXPECT_NE(result.out.find("without checksums"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace moiety::app
