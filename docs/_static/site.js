// A page opened from a file cannot read other files, so the results of a search have no excerpts there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
