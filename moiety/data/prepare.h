// The work of `moiety prepare`: text or JSONL becomes token files.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moiety/data/documents.h"
#include "moiety/data/foreign_tokens.h"

namespace moiety::data {

// The progress of a preparation, and the file that it reads.
struct PrepareProgress {
  uint64_t bytes = 0;      // decompressed bytes of the inputs that are done
  uint64_t all_bytes = 0;  // bytes of the input files on the disk; for standard input unknown
  uint64_t documents = 0;
  std::string path;
};

struct PrepareOptions {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";
  std::string out;            // PREFIX: PREFIX.tok, or PREFIX.train.tok and PREFIX.valid.tok
  double valid_fraction = 0;  // 0: one file
  DocumentRules rules;
  std::optional<ForeignTokens> from;  // inputs are token files of another project
  bool overwrite = true;              // false: files that are there already are a UsageError
  int workers = 0;                    // 0: one per core; the output does not depend on it
  std::function<void(const PrepareProgress&)> progress;  // called after every block; may be empty
};

struct PrepareSummary {
  struct File {
    std::string path;
    uint64_t documents = 0;
    uint64_t tokens = 0;
    uint64_t source_bytes = 0;  // with a loss mask, of the targets alone
    uint64_t targets = 0;       // tokens with a loss
  };
  std::vector<File> files;  // train before valid
  int64_t inputs = 0;
  int64_t repeated = 0;  // inputs that were named twice and taken once
  int64_t bad = 0;       // documents left out by skip_bad
  int64_t empty = 0;     // documents without text, left out
};

// Whether document d goes to the validation file, where d counts the documents that are kept, from
// 0, in the order of the inputs. It does iff its random number is below valid_fraction, so it stays
// there when input is appended.
bool is_validation_document(uint64_t d, double valid_fraction);

// Makes the token files. Throws DataError (nothing is written), UsageError or IoError.
PrepareSummary prepare(const PrepareOptions& options);

}  // namespace moiety::data
