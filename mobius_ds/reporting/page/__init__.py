"""A comparison as pictures: the HTML page, its charts, and PNGs."""
