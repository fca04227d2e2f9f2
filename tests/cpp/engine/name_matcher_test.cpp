// The matching of names by itself: what is matched, in which order, and that all ranks come to the same.

#include "engine/named/name_matcher.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "support/errors.h"

namespace multiring {
namespace {

using Names = std::vector<std::string>;
using namespace testing;

/// Of three ranks, `odd` does not agree with the others.
void expect_differs(const Error& error, int rank, const std::string& name, int odd) {
  EXPECT_EQ(error.context().rank, rank);
  EXPECT_EQ(error.context().tensor, name);
  EXPECT_EQ(error.context().odd, odd);
  EXPECT_EQ(error.context().peer, rank == odd ? 0 : odd);
}

/// The matchers of all ranks, and the rounds between them.
class Job {
 public:
  explicit Job(int size, std::size_t numbered = NameMatcher::kNumberedNames) {
    for (int rank = 0; rank < size; ++rank) matchers_.emplace_back(size, rank, numbered);
  }

  /// One round; `news[r]` is what rank r announces. What was matched, which is the same on all ranks.
  std::vector<Match> round(const std::vector<std::vector<Announcement>>& news) {
    std::vector<std::vector<std::byte>> messages;
    for (std::size_t rank = 0; rank < news.size(); ++rank)
      messages.push_back(matchers_[rank].encode(news[rank]));
    bytes_ = 0;
    for (const auto& message : messages) bytes_ += message.size();
    std::vector<Match> result;
    for (std::size_t self = 0; self < matchers_.size(); ++self) {
      for (std::size_t rank = 0; rank < messages.size(); ++rank)
        matchers_[self].take(static_cast<int>(rank), messages[rank]);
      auto mine = matchers_[self].matched();
      if (self == 0) {
        result = std::move(mine);
        continue;
      }
      EXPECT_EQ(names(mine), names(result));
      for (std::size_t i = 0; i < std::min(mine.size(), result.size()); ++i)
        EXPECT_EQ(mine[i].priority, result[i].priority);
    }
    return result;
  }
  Names names_of_round(const std::vector<Names>& news) {
    std::vector<std::vector<Announcement>> announcements;
    for (const Names& of_rank : news) {
      announcements.emplace_back();
      for (const std::string& name : of_rank) announcements.back().push_back({name});
    }
    return names(round(announcements));
  }
  static Names names(const std::vector<Match>& matches) {
    Names result;
    for (const Match& match : matches) result.push_back(match.name);
    return result;
  }
  std::size_t bytes() const { return bytes_; }
  NameMatcher& matcher(std::size_t rank) { return matchers_[rank]; }

 private:
  std::vector<NameMatcher> matchers_;
  std::size_t bytes_ = 0;
};

TEST(NameMatcher, MatchesInTheOrderOfRankZero) {
  Job job(3);
  EXPECT_EQ(job.names_of_round({{"a", "b", "c"}, {"c", "a", "b"}, {"b", "c", "a"}}), (Names{"a", "b", "c"}));
  EXPECT_EQ(job.names_of_round({{"c", "b"}, {"c"}, {"b", "c"}}), Names{"c"});
  EXPECT_EQ(job.names_of_round({{}, {"b"}, {}}), Names{"b"});
  EXPECT_EQ(job.names_of_round({{}, {}, {}}), Names{});
  EXPECT_FALSE(job.matcher(0).has_unmatched());
}

TEST(NameMatcher, LateRanksCompleteWhatWasAnnouncedBefore) {
  Job job(2);
  EXPECT_EQ(job.names_of_round({{}, {"x", "y"}}), Names{});
  EXPECT_EQ(job.names_of_round({{"y"}, {}}), Names{"y"});
  EXPECT_TRUE(job.matcher(1).has_unmatched());
  EXPECT_EQ(job.names_of_round({{"z", "x"}, {"z"}}), (Names{"z", "x"}));
}

TEST(NameMatcher, TheKthMeetsTheKth) {
  Job job(2);
  EXPECT_EQ(job.names_of_round({{"a", "a", "a"}, {"a"}}), Names{"a"});
  EXPECT_EQ(job.matcher(0).unmatched().size(), 2u);
  EXPECT_EQ(job.names_of_round({{"b"}, {"b", "a", "a", "a"}}), (Names{"a", "a", "b"}));
  EXPECT_EQ(job.matcher(0).unmatched()[0].missing, std::vector<int>{0});
  EXPECT_EQ(job.names_of_round({{"a"}, {}}), Names{"a"});
  EXPECT_TRUE(job.matcher(0).unmatched().empty());
}

TEST(NameMatcher, PriorityIsThatOfRankZero) {
  Job job(2);
  const auto matches = job.round({{{"a", 7}, {"b", -1}}, {{"b", 3}, {"a", 0}}});
  ASSERT_EQ(matches.size(), 2u);
  EXPECT_EQ(matches[0].priority, 7);
  EXPECT_EQ(matches[1].priority, -1);
}

// What all ranks submit in one order: another name with the same number is no other operation's turn.
TEST(NameMatcher, ANumberInTheOrderHasOneName) {
  const auto numbered = [](const char* name, std::uint64_t number) {
    return Announcement{name, 0, 1, 0, number};
  };
  Job job(3);
  EXPECT_EQ(job.round({{numbered("a", 1), {"free"}}, {}, {numbered("a", 1), numbered("b", 2)}}).size(), 0u);
  EXPECT_EQ(Job::names(job.round({{numbered("b", 2)}, {{"free"}, numbered("a", 1)}, {{"free"}}})),
            (Names{"a", "free"}));
  const Error error = error_of(
      ErrorKind::kMismatch, [&] { job.round({{}, {numbered("c", 2)}, {}}); },
      "as number 2 of those that all submit in one order: rank 2 'b', rank 1 'c'");
  expect_differs(error, 0, "b", 1);
}

TEST(NameMatcher, OneRankMatchesAtOnce) {
  Job job(1);
  EXPECT_EQ(job.names_of_round({{"a", "b", "a"}}), (Names{"a", "b", "a"}));
}

TEST(NameMatcher, KnownNamesTravelAsNumbers) {
  Job job(2, 2);
  const Names names{std::string(100, 'a'), std::string(100, 'b'), std::string(100, 'c')};
  job.names_of_round({names, names});
  EXPECT_EQ(job.bytes(), 6 * (32 + 100u));
  EXPECT_EQ(job.names_of_round({names, {names[2], names[1], names[0]}}), names);
  EXPECT_EQ(job.bytes(), 6 * 32 + 2 * 100u);  // there are numbers for two
}

TEST(NameMatcher, SaysWhoWaitsForWhom) {
  Job job(4);
  job.names_of_round({{"b"}, {"a", "b"}, {"b"}, {}});
  const auto unmatched = job.matcher(3).unmatched();
  ASSERT_EQ(unmatched.size(), 2u);
  EXPECT_EQ(unmatched[0].name, "a");
  EXPECT_EQ(unmatched[0].announced, std::vector<int>{1});
  EXPECT_EQ(unmatched[0].missing, (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(unmatched[1].missing, std::vector<int>{3});
}

using News = std::vector<Announcement>;

/// Has `matcher` take what ranks 0, 1, ... of three announce; what it matches then.
std::vector<Match> matched(NameMatcher& matcher, const std::vector<News>& news) {
  for (std::size_t rank = 0; rank < news.size(); ++rank)
    matcher.take(static_cast<int>(rank), matcher.encode(news[rank]));
  return matcher.matched();
}

TEST(NameMatcher, DifferentNumbersOrStepsAreAMismatch) {
  const News one{{"bucket", 0, 1}};
  const News two{{"bucket", 0, 2}};
  const News fifth{{"bucket", 0, 1, 5}};
  const News sixth{{"bucket", 0, 1, 6}};
  for (int rank = 0; rank < 3; ++rank) {
    NameMatcher counts(3, rank);
    EXPECT_TRUE(matched(counts, {two, one}).empty());
    counts.take(2, counts.encode(two));
    Error error = error_of(
        ErrorKind::kMismatch, [&] { counts.matched(); },
        "'bucket': rank 1 submitted 1; ranks 0, 2 submitted 2");
    expect_differs(error, rank, "bucket", 1);
    NameMatcher steps(3, rank);
    EXPECT_EQ(matched(steps, {fifth, fifth, fifth}).size(), 1u);
    error = error_of(
        ErrorKind::kMismatch, [&] { matched(steps, {fifth, sixth, fifth}); },
        "'bucket': ranks 0, 2 submitted it in step 5; rank 1 submitted it in step 6");
    expect_differs(error, rank, "bucket", 1);
    const News third{{"bucket", 0, 1, (std::uint64_t{3} << 32) + 5}};
    const News fourth{{"bucket", 0, 1, (std::uint64_t{4} << 32) + 5}};
    NameMatcher parts(3, rank);
    error_of(
        ErrorKind::kMismatch, [&] { matched(parts, {third, fourth, third}); },
        "'bucket': ranks 0, 2 submitted it in step 3; rank 1 submitted it in step 4");
  }
}

TEST(NameMatcher, DifferentNamesInOnePlaceOfTheOrderAreAMismatch) {
  for (int self = 0; self < 2; ++self) {
    NameMatcher matcher(3, self);
    const News body{{"body", 0, 1, 0, 1}, {"body", 0, 1, 0, 2}};
    const News longer{{"free"}, {"body", 0, 1, 0, 3}};
    const News shorter{{"after", 0, 1, 0, 3}, {"free"}};
    EXPECT_EQ(matched(matcher, {body, body, body}).size(), 2u);
    matcher.take(0, matcher.encode(longer));
    const Error error = error_of(
        ErrorKind::kMismatch, [&] { matcher.take(1, matcher.encode(shorter)); },
        "as number 3 of those that all submit in one order: rank 0 'body', rank 1 'after'");
    expect_differs(error, self, self == 0 ? "body" : "after", 1);
  }
}

TEST(NameMatcher, RefusesGarbledMessages) {
  const std::vector<Announcement> news{{"name"}};
  const auto good = NameMatcher(2, 0).encode(news);
  for (std::size_t bytes = 1; bytes < good.size(); ++bytes) {
    NameMatcher matcher(2, 0);
    error_of(ErrorKind::kInternal, [&] { matcher.take(1, {good.data(), bytes}); }, "rank 1");
  }
  auto bad = good;
  bad[0] = std::byte{9};  // a number that no name has
  NameMatcher matcher(2, 0);
  error_of(ErrorKind::kInternal, [&] { matcher.take(0, bad); });
}

// Every rank announces the same names in an order of its own, split into rounds at random.
TEST(NameMatcher, AnyOrderAndAnyRoundsMatchEverything) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t size = 1 + random() % 5;
    Job job(static_cast<int>(size), seed % 2 == 0 ? 3 : 100);
    Names all;
    for (std::size_t i = 0; i < 1 + random() % 20; ++i)
      all.push_back(std::string(1, static_cast<char>('a' + random() % 8)));
    std::vector<Names> left(size, all);
    for (Names& names : left) std::shuffle(names.begin(), names.end(), random);
    std::map<std::string, int> matched;
    while (std::any_of(left.begin(), left.end(), [](const Names& names) { return !names.empty(); })) {
      std::vector<Names> news(size);
      for (std::size_t rank = 0; rank < size; ++rank)
        for (std::size_t count = random() % 4; count > 0 && !left[rank].empty(); --count) {
          news[rank].push_back(left[rank].back());
          left[rank].pop_back();
        }
      for (const std::string& name : job.names_of_round(news)) ++matched[name];
    }
    std::map<std::string, int> wanted;
    for (const std::string& name : all) ++wanted[name];
    EXPECT_EQ(matched, wanted) << "seed " << seed;
    EXPECT_FALSE(job.matcher(0).has_unmatched());
    EXPECT_TRUE(job.matcher(0).unmatched().empty());
  }
}

}  // namespace
}  // namespace multiring
