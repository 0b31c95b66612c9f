// What the theme leaves out for screen readers and keyboards (found by axe-core).
for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.setAttribute("aria-level", "2");
for (const block of document.querySelectorAll("pre")) block.tabIndex = 0; // it may have to be scrolled
document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
