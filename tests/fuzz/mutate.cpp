// Drives a fuzzer without libFuzzer: CORPUS [RUNS [SEED]] runs every file of the corpus, then RUNS mutations
// of them. The same seed gives the same inputs: a failure comes back in a debugger.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

std::vector<Input> read_corpus(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  Mutator(const std::vector<Input>& corpus, std::uint64_t seed) : corpus_(corpus), random_(seed) {}

  Input next() {
    Input input = corpus_[below(corpus_.size())];
    for (std::size_t changes = 1 + below(6); changes > 0; --changes) change(input);
    return input;
  }

 private:
  std::size_t below(std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random_);
  }

  void change(Input& input) {
    const std::size_t at = below(input.size() + 1);
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    const auto rest = static_cast<std::size_t>(input.end() - place);
    switch (below(6)) {
      case 0:
        if (rest > 0) *place ^= static_cast<std::uint8_t>(1U << below(8));
        break;
      case 1:
        if (rest > 0) *place = static_cast<std::uint8_t>(random_());
        break;
      case 2:  // numbers at the edges of what a field holds
        for (std::size_t i = 0, fill = below(2); i < std::min<std::size_t>(8, rest); ++i)
          place[static_cast<std::ptrdiff_t>(i)] = fill == 0 ? 0 : 0xff;
        break;
      case 3:
        input.erase(place, place + static_cast<std::ptrdiff_t>(std::min(rest, 1 + below(16))));
        break;
      case 4:
        input.insert(place, 1 + below(16), static_cast<std::uint8_t>(random_()));
        break;
      default: {  // the end of another one
        const Input& other = corpus_[below(corpus_.size())];
        const std::size_t from = std::min(at, other.size());
        input.erase(place, input.end());
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      }
    }
  }

  const std::vector<Input>& corpus_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t runs = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 100000;
  const std::uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const std::vector<Input> corpus = argc > 1 ? read_corpus(argv[1]) : std::vector<Input>();
  if (corpus.empty()) {
    std::fprintf(stderr, "usage: %s CORPUS [RUNS [SEED]], with files in CORPUS\n", argv[0]);
    return 2;
  }
  for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  Mutator mutator(corpus, seed);
  for (std::uint64_t i = 0; i < runs; ++i) {
    const Input input = mutator.next();
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs of the corpus and %llu mutations\n", corpus.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}
