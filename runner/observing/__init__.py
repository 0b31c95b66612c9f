"""What a launcher shows of its job to those who look at it: the page, ``top``, the report and the progress line."""
