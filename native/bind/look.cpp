#include "look.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

using Word = std::uint64_t;

// How far to look for a word: no farther than the smallest of these objects in any torch since 2.6.
constexpr std::size_t kObjectWords = 5, kTensorWords = 22, kStorageWords = 7;
constexpr std::size_t kSkipped = 2;  // words of a tensor that tell nothing of its values
constexpr std::int32_t kInline = 5;  // dimensions whose sizes stand in the tensor itself
constexpr std::size_t kNowhere = ~std::size_t{0};
constexpr std::size_t kKinds = 4;  // of flags that plain tensors have

struct Layout {
  std::size_t tensor = kNowhere;                   // in the Python object: the address of the tensor
  std::size_t flags = kNowhere;                    // in the tensor: its set of dispatch keys
  std::size_t storage = kNowhere;                  // in the tensor: the address of its storage
  std::size_t begin = kNowhere, bytes = kNowhere;  // in the storage
  std::array<Word, kKinds> plain{};                // flags; 0: no more of them

  // Seen compares the words from kSkipped to the flags, and counts on the storage's address being among them.
  bool known() const {
    return tensor != kNowhere && flags != kNowhere && storage >= kSkipped && storage < flags && begin != kNowhere &&
           bytes != kNowhere && plain[0] != 0;
  }
};

Layout g_layout;
bool g_known = false;
bool g_words_tell = false;  // was it tried that whatever changes in a tensor changes its words?
std::uint64_t g_asked = 0, g_looked = 0;

Word word(std::uintptr_t object, std::size_t number) {
  Word found;
  std::memcpy(&found, reinterpret_cast<const std::byte*>(object) + number * sizeof(Word), sizeof found);
  return found;
}

using Pairs = std::vector<std::pair<std::uintptr_t, Word>>;  // (object, the word that it is known to have)

// The first word that every object has as it is known to. Its objects differ, or any word would do.
std::size_t place(const Pairs& pairs, std::size_t words) {
  const auto differs = [&](const auto& pair) { return pair.second != pairs.front().second; };
  if (pairs.empty() || std::none_of(pairs.begin(), pairs.end(), differs)) return kNowhere;
  for (std::size_t i = 0; i < words; ++i)
    if (std::all_of(pairs.begin(), pairs.end(), [i](const auto& pair) { return word(pair.first, i) == pair.second; }))
      return i;
  return kNowhere;
}

// (tensor, its address, its flags, the address of its storage, where the storage begins, the bytes that it has)
using Probe = std::tuple<nb::object, std::uintptr_t, Word, std::uintptr_t, std::uintptr_t, std::size_t>;

bool learn(const std::vector<Probe>& probes, const std::vector<Word>& plain) {
  g_known = g_words_tell = false;
  Pairs tensors, flags, storages, begins, bytes;
  for (const auto& [object, tensor, set, storage, begin, size] : probes) {
    tensors.emplace_back(reinterpret_cast<std::uintptr_t>(object.ptr()), tensor);
    flags.emplace_back(tensor, set);
    storages.emplace_back(tensor, storage);
    begins.emplace_back(storage, begin);
    bytes.emplace_back(storage, size);
  }
  Layout found;
  found.tensor = place(tensors, kObjectWords);
  if (found.tensor == kNowhere) return false;  // then the addresses are of something else
  found.flags = place(flags, kTensorWords);
  found.storage = place(storages, kTensorWords);
  found.begin = place(begins, kStorageWords);
  found.bytes = place(bytes, kStorageWords);
  if (plain.size() > kKinds) return false;
  std::copy(plain.begin(), plain.end(), found.plain.begin());
  g_layout = found;
  g_known = found.known();
  return g_known;
}

}  // namespace

bool look(PyObject* tensor, Look& out) {
  if (!g_known) return false;
  ++g_looked;
  const std::uintptr_t at = word(reinterpret_cast<std::uintptr_t>(tensor), g_layout.tensor);
  if (at == 0) return false;
  const Word flags = word(at, g_layout.flags);
  if (flags == 0 || std::find(g_layout.plain.begin(), g_layout.plain.end(), flags) == g_layout.plain.end())
    return false;
  const std::uintptr_t storage = word(at, g_layout.storage);
  if (storage == 0) return false;
  out = {word(storage, g_layout.begin), word(storage, g_layout.bytes)};
  return out.bytes <= static_cast<std::size_t>(PTRDIFF_MAX);  // else it is a symbol for a number
}

bool Seen::still(PyObject* tensor) const {
  if (!set_ || !g_words_tell) return false;
  const std::uintptr_t at = word(reinterpret_cast<std::uintptr_t>(tensor), g_layout.tensor);
  if (at == 0 || std::memcmp(words_.data(), reinterpret_cast<const std::byte*>(at) + kSkipped * sizeof(Word),
                             (g_layout.flags + 1 - kSkipped) * sizeof(Word)) != 0)
    return false;
  const std::uintptr_t storage = word(at, g_layout.storage);  // not null: it has not changed
  return word(storage, g_layout.begin) == look_.begin && word(storage, g_layout.bytes) == look_.bytes;
}

void Seen::remember(PyObject* tensor, const Look& found, std::int32_t dimensions) {
  set_ = g_words_tell && dimensions <= kInline;
  if (!set_) return;
  look_ = found;
  const std::uintptr_t at = word(reinterpret_cast<std::uintptr_t>(tensor), g_layout.tensor);
  std::memcpy(words_.data(), reinterpret_cast<const std::byte*>(at) + kSkipped * sizeof(Word),
              (g_layout.flags + 1 - kSkipped) * sizeof(Word));
}

void count_asked() { ++g_asked; }

void bind_look(nb::module_& m) {
  m.def(
      "learn_tensors", &learn, "probes"_a, "plain"_a,
      nb::sig("def learn_tensors(probes: list[tuple[object, int, int, int, int, int]], plain: list[int]) -> bool"),
      "Learn where torch keeps flags and sizes, by (tensor, its address, its flags, the address of its storage, where "
      "that begins, its bytes); `plain`: flags of plain tensors. False: not found, tensors are asked. [] forgets.");
  m.def(
      "look",
      [](nb::handle tensor) {
        Look found{};
        return look(tensor.ptr(), found) ? nb::object(nb::make_tuple(found.begin, found.bytes))
                                         : nb::object(nb::none());
      },
      "tensor"_a, nb::sig("def look(tensor: object) -> tuple[int, int] | None"),
      "Where the storage of a plain tensor begins, and its bytes; None: ask the tensor.");
  m.def(
      "words_tell", [](bool trust) { g_words_tell = trust && g_known; }, "trust"_a,
      "Trust from now on that a tensor whose words are the same is the same.");
  m.def(
      "seen_after",
      [](nb::handle tensor, nb::handle change) {
        DLTensor t;
        Seen seen;
        if (Look found; describe(tensor.ptr(), t) && look(tensor.ptr(), found))
          seen.remember(tensor.ptr(), found, t.ndim);
        change();
        return seen.still(tensor.ptr());
      },
      "tensor"_a, "change"_a, nb::sig("def seen_after(tensor: object, change: object) -> bool"),
      "Are the words of a tensor the same after change()?");
  m.def("tensors_asked", [] { return g_asked; }, "How many times a tensor was asked through Python, in this process.");
  m.def("tensors_looked_at", [] { return g_looked; }, "How many times the memory of a tensor was looked at.");
}

}  // namespace shmsync::bind
