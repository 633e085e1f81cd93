// Libraries that are opened at run time.
#include "moiety/base/shared_library.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

namespace moiety {
namespace {

namespace fs = std::filesystem;

class SharedLibraries : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "moiety-libraries-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root = name;
    path = std::getenv("PATH");
  }
  void TearDown() override {
    setenv("PATH", path.c_str(), 1);
    fs::remove_all(root);
  }
  static constexpr const char* kName = "libmoiety_test_of_loading.so.7";

  fs::path root;
  std::string path;
};

TEST_F(SharedLibraries, ByTheirUsualNames) {
  const SharedLibrary math = SharedLibrary::open({kName, "libm.so.6"});
  ASSERT_TRUE(math);
  EXPECT_EQ(fs::path(math.path()).filename(), "libm.so.6");
  EXPECT_EQ(math.find<double(double)>("sqrt")(9), 3);
  EXPECT_EQ(math.find<double(double)>("no_such_function"), nullptr);
}

TEST_F(SharedLibraries, InThePackagesOfPython) {
  const std::string real = SharedLibrary::open({"libm.so.6"}).path();
  // A virtual environment: its python3 is a link to an interpreter elsewhere.
  fs::create_directories(root / "venv/bin");
  fs::create_directories(root / "system/bin");
  std::ofstream(root / "system/bin/python3.12");
  fs::create_symlink(root / "system/bin/python3.12", root / "venv/bin/python3");
  setenv("PATH", ("/nowhere:" + (root / "venv/bin").string() + ":" + path).c_str(), 1);
  EXPECT_TRUE(python_library_folders().empty());
  const SharedLibrary none = SharedLibrary::open({kName});
  EXPECT_FALSE(none);
  EXPECT_NE(none.error().find(kName), std::string::npos) << none.error();
  EXPECT_EQ(none.find<int()>("sqrt"), nullptr);
  for (const char* prefix : {"system", "venv"}) {
    const fs::path folder = root / prefix / "lib/python3.12/site-packages/nvidia/thing/lib";
    fs::create_directories(folder);
    // Loaders tell files apart by what they are, not by name: a copy is a library of its own.
    fs::copy_file(real, folder / kName);
    EXPECT_EQ(python_library_folders().front(), folder);
    const SharedLibrary found = SharedLibrary::open({kName});
    EXPECT_EQ(found.path(), (folder / kName).string());
    EXPECT_EQ(found.find<double(double)>("sqrt")(16), 4);
  }
  EXPECT_EQ(python_library_folders().size(), 2u);
}

}  // namespace
}  // namespace moiety
