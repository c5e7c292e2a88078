"""HTML, Markdown and JUnit from result records."""
