"""What makes a sum private: keys, random words, exact noise, and the release of the result."""
