"""One update a step: from ledgers to rows."""
