// Which version each thread has used last, for each subscriber: what it computed is of that version, whatever other
// threads have applied since.
//
// A thread's labels, one for each subscriber that it has used, are its own, and end with it. Those of a subscriber
// that is gone are removed with the next new one, so there are never more than subscribers.
//
// INV: a thread that has a label and applies a version gets that version's label, so its label is never older than what
//      it has made the views show.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shmsync::bind {

class ThreadVersions {
 public:
  // From now on the subscriber reads this arena, and has applied no version of it yet.
  void move_to(std::string session) {
    session_ = std::make_shared<const std::string>(std::move(session));
    apply(0);
  }
  // The views show this version.
  void apply(std::uint64_t version) {
    applied_ = version;
    if (Label* mine = find()) set(*mine, version);
  }
  std::uint64_t applied() const { return applied_; }

  // The calling thread uses this version.
  void use(std::uint64_t version) {
    if (Label* mine = find()) return set(*mine, version);
    auto& labels = of_this_thread();
    std::erase_if(labels, [](const Label& each) { return each.subscriber.expired(); });
    labels.push_back({key_.get(), key_, session_, version});
  }
  bool has_used() const { return find() != nullptr; }
  void forget() {
    std::erase_if(of_this_thread(), [this](const Label& each) { return each.key == key_.get(); });
  }

  // The session of the arena that the subscriber reads.
  const std::string& reads() const { return *session_; }

  // What the calling thread has used last; without a label, what is applied.
  std::uint64_t version() const {
    const Label* mine = find();
    return mine ? mine->version : applied_;
  }
  const std::string& session() const { return *used_session(); }
  std::shared_ptr<const std::string> used_session() const {
    const Label* mine = find();
    return mine ? mine->session : session_;
  }

 private:
  struct Label {
    const void* key;
    std::weak_ptr<const void> subscriber;  // while this is there, no other subscriber gets the same key
    std::shared_ptr<const std::string> session;
    std::uint64_t version;
  };

  static std::vector<Label>& of_this_thread() {
    thread_local std::vector<Label> labels;
    return labels;
  }
  Label* find() const {
    for (Label& each : of_this_thread())
      if (each.key == key_.get()) return &each;
    return nullptr;
  }
  void set(Label& mine, std::uint64_t version) {
    mine.version = version;
    if (mine.session != session_) mine.session = session_;
  }

  const std::shared_ptr<const char> key_ = std::make_shared<const char>('\0');
  std::shared_ptr<const std::string> session_;
  std::uint64_t applied_ = 0;
};

}  // namespace shmsync::bind
