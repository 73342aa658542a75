// Scores of search results: pages that answer questions come before figures and the source's pages.
var Scorer = {
  score: ([page, , , , score]) =>
    score + (/^(symptoms|recipes|quickstart)/.test(page) ? 4 : 0) -
    (/^(architecture|internals|lanes|scale)/.test(page) ? 4 : 0),
  // the scores of Sphinx
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
