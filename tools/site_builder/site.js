// What scrolls sideways can be reached, and scrolled, by the keyboard. The theme adds its buttons, and
// takes tabs away, after this script has run: all is looked at again when the page changes.
const mark = () => {
  document.querySelectorAll("pre > code, .md-typeset__scrollwrap").forEach((one) => {
    if (one.scrollWidth > one.clientWidth && one.tabIndex !== 0) one.tabIndex = 0;
  });
  // Each is called after its block of code.
  document.querySelectorAll(".md-code__nav").forEach((one, number) => {
    const name = `Code block ${number + 1}`;
    if (one.getAttribute("aria-label") !== name) one.setAttribute("aria-label", name);
  });
};
new MutationObserver(mark).observe(document.body, { childList: true, subtree: true, attributeFilter: ["tabindex"] });
addEventListener("resize", mark);
mark();
